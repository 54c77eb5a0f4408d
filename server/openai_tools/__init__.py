"""Tools and the newer endpoints: vLLM's serving objects above a client of ours, whose sequences
wait in the gateway's queue.

vllm_imports     what is imported of vLLM's API server, the only module that does
serving          the serving objects of one life of the engine
proxy            what they take for the engine
call             one call on its way through them: what it asks for, what it writes
endpoints        the endpoints that they answer, and their errors
sampling         from vLLM's parameters to ours
serving_objects  which serving objects are in force
"""
