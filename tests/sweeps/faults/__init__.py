"""Kills, damaged files, hostile values, faulty user code."""
