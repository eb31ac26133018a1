"""Tables and pictures of docs/, made by hand."""
