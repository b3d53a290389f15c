//! The HTTP gateway: OpenAI-compatible endpoints over the engine handle; knows nothing of tensors.
