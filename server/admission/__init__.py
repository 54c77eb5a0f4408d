"""Admission where more requests come than the gateway can serve: bounds, early rejections, honest
waits, priorities, rate limits.
"""
