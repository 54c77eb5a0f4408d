"""Parts of `bench/gateway.py`: what the gateway costs, beside a bare web framework, `vllm serve`
and other proxies.
"""
