"""Parts of `bench/gateway.py`: what the gateway costs, beside a bare web framework and beside
`vllm serve`.
"""
