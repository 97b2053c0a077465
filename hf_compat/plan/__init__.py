"""Translate arguments into settings of Lightning, without starting a run or writing a file.

The translation also reads the launcher's environment variables, and the JSON files that `deepspeed`, `fsdp_config` and
`accelerate launch` name.
"""
