"""The tests' server and client are the ones ``loadtest`` ships."""

from loadtest.servers import Client, Completion, Sample, Server, ServerError, free_port

__all__ = ["Client", "Completion", "Sample", "Server", "ServerError", "free_port"]
