"""What every test shares: a strict jax and small models."""
