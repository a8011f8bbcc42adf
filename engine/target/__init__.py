"""The target model: loading, the forward pass, hidden states, compiled blocks and quantised weights."""
