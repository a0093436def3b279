from transduce.cli import main

main()
