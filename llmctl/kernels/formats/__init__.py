"""What a stored weight is: formats, block layouts, QuantTensor, and the codecs between them and float32. No torch."""
