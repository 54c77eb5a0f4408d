"""The data path: connections that are read and written here."""
