"""Aion on Spark: the only package that imports pyspark.

This module imports nothing, so that workers load only the modules that they need.
"""
