"""What the gateway does when more comes in than it can serve: bounds, early rejections, honest
waits, priorities, rate limits.
"""
