"""Objects of packages that may be absent: `transformers`, `peft`, `datasets`, DeepSpeed.

A type check imports none of them. A package that is not loaded cannot have the object's type. `patching.py` and
`reporting_callback` import `transformers`, which is asked for there.
"""
