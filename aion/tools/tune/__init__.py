"""A policy chosen by replaying a trace of arrivals: what it would cost, on a disk like this machine's (docs/tuning.md).

``trace`` what is recorded; ``disk`` a disk with a simulated clock; ``tiers`` the store as a model of sizes;
``simulator`` the real operator over both; ``search`` the policies tried; ``calibrate`` this machine's figures;
``command`` the rest.
"""
