"""A script's run, written down as a plain Lightning project that needs neither this package nor HF's Trainer."""
