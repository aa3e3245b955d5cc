"""Aion on Spark: the only package that imports pyspark.

Nothing is imported here: workers load what they need of it, and no more.
"""
