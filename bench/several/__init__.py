"""Parts of `bench/several_servers.py`: the live prediction of one queue before two real servers."""
