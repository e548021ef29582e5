"""The attention backend's name, apart from its code: the launching process needs only this."""

BACKEND = "raggedkv"
