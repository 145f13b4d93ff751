"""Linear layers: what they are, and which operator computes them."""
