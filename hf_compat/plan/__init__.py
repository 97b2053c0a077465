"""From arguments to what Lightning is told. Nothing is started or written here.

What is read besides the arguments: the launcher's variables, and the JSON files that `deepspeed`, `fsdp_config` and
`accelerate launch` name.
"""
