"""What goes over the wire: requests as they are checked, answers as they are published."""
