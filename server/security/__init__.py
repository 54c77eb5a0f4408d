"""Who may call what, how large a call may be, what an error may tell. The routes' decisions:
routes.py; the check: guard.py.
"""
