"""What keeps a board at its best point while load, heat and models change; its thinking is pure."""
