"""Objects of packages that may be absent: `transformers`, `peft`, `datasets`, DeepSpeed.

A question about an object imports none of them: what is not loaded yet cannot be its type. `patching.py` and
`reporting_callback` import `transformers`, which is asked for there.
"""
