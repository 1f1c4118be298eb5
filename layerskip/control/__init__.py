"""What the controller knows and weighs: passes' times, acceptance, and where drafts end."""
