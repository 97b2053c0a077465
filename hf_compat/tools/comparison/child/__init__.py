"""The files that run beside a compared script, in any interpreter with transformers, even without hf_compat.

They import only the standard library, and torch and transformers when the script is about to run.
"""
