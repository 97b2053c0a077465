"""Every configuration on a pretended GPU."""
