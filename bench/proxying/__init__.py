"""Parts of `bench/proxy.py`: what it costs to pass a call on, beside other proxies."""
