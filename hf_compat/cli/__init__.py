"""The command line: `hf-compat run`, `fit`, `plot`, `convert`, `explain`; `HfArgumentParser`."""
