"""Operations that draft and verify share. ``reference`` is each one's definition."""
