"""The node agent: starts one service on its machine for a flow on another, and ends it when the flow is lost."""
