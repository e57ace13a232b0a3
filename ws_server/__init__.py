"""The WebSocket token stream: protocol, server and client."""
