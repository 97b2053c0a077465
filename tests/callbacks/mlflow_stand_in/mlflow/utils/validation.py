"""MLflow's limits, which the callback reads."""

MAX_PARAM_VAL_LENGTH = 6000
MAX_PARAMS_TAGS_PER_BATCH = 100
