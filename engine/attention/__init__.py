"""Attention over slots, behind one seam."""
