"""Objects of packages that may be absent. Imports `hf/` only; the other layers may ask it about an object.

Nothing here imports a guest package by itself: what is not loaded yet cannot be the type of an object at hand.
"""
