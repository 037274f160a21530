"""Metrics: pure functions on logits and labels. Percentages are from 0 to 100."""
