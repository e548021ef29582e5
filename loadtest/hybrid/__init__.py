"""A small hybrid model, trained here: recurrent layers, and full attention that recall needs."""
