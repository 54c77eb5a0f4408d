"""Metadata of the fields of settings: what holds of the options that set them."""

NO_OPTION = {"option": False}  # no option sets it by itself
RELOADED = {"reloaded": True}  # SIGHUP takes its new value up
