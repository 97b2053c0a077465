"""The command line: `hf-compat run`, `fit`, `convert`, `seal`; `HfArgumentParser`."""
