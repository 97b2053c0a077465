"""Old scripts rewritten for this package, or for transformers 5: names and words only, comments and layout stay.

HF words. Imports libcst at its top, and of this package nothing heavier than `hf/`.
"""
