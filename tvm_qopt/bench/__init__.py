"""Time updates side by side in one run."""
