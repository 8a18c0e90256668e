"""Results that were computed before, and results that are being computed right now."""
