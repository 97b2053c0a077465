"""What runs beside a script that is compared: in any interpreter with transformers, hf_compat installed or not.

These files import the standard library, and torch and transformers when the script is about to run, and nothing
of hf_compat.
"""
