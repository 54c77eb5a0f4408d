"""What the commands share: arguments, tables, paths, keys of remote gateways."""
