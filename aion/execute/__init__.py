"""Carries out what the operator orders: reads blocks, computes windows, and makes rows of panes."""
