"""Write a script's run as a plain Lightning project that needs neither this package nor HF's Trainer."""
