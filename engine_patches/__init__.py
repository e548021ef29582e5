"""RaggedKV's SGLang plugin: a KV cache whose size differs per layer and KV head."""
