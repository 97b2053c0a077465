"""The process that training runs in: launcher, collectives, seeds, random states, signals. No HF and no Lightning."""
