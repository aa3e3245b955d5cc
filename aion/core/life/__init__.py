"""What every kind of windows goes by: facts and orders, states, rules, the watermark, the budget of late work. Pure.

Windows of time and windows of keys are beside each other above it, and the operator above both.
"""
