"""Prompts that tests and benchmarks share.

`PROMPTS` are sixty of many kinds; `COPY_PROMPTS` are ten whose answers mostly repeat the prompt.
"""

_QUESTIONS = [
    "Explain speculative decoding to a child.",
    "What is the capital of France, and what is it known for?",
    "Why is the sky blue during the day and red in the evening?",
    "Give three reasons to learn a second language.",
    "How does a bicycle stay upright while it moves?",
    "What should I pack for a week of hiking in the mountains?",
    "Describe the water cycle in five sentences.",
    "Who invented the printing press, and how did it change Europe?",
    "What is the difference between weather and climate?",
    "How do vaccines work?",
    "Suggest a vegetarian dinner that takes less than 30 minutes.",
    "What are the main causes of inflation?",
    "How many legs do 7 spiders and 3 ants have together? Think step by step.",
    "If a train travels 120 km in 90 minutes, what is its average speed in km/h?",
    "List the planets of the solar system from the closest to the sun to the farthest.",
    "Is it safe to eat potatoes that have started to sprout?",
]

_WRITING = [
    "Write a short poem about a lighthouse in winter.",
    "Write a friendly email that moves Tuesday's meeting to Thursday at 10:00.",
    "Once upon a time, in a village at the foot of a sleeping volcano,",
    "The old clockmaker looked up from his bench and said,",
    "Write a product description for a lamp that follows you around the house.",
    "Continue this story: The letter had no stamp, no sender, and it was still warm.",
    "Invent a proverb about patience and explain when a grandmother would use it.",
    "Write a dialogue between a cat and a robot vacuum cleaner.",
    "Draft a complaint to the railway about a delay of 3 hours and 25 minutes.",
    "Write the opening paragraph of a detective novel set on a space station.",
    "Give me five names for a bakery that is also a bookshop.",
    "Write a haiku about rain on a tin roof, then explain its imagery.",
]

_CODE = [
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "def is_palindrome(text: str) -> bool:\n    ",
    "What does this do?\n\nfor i in range(len(xs) - 1, 0, -1):\n    xs[i], xs[0] = xs[0], xs[i]\n",
    "SELECT name, COUNT(*) FROM orders",
    "Write a regular expression that matches dates such as 2024-02-29.",
    "Explain the difference between a list and a tuple in Python.",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "',
    "#include <stdio.h>\n\nint main(void) {\n    int total = 0;\n    for (int i = 1; i <= 10; i++)",
    "Write a shell command that counts the lines of all .py files below this directory.",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "Find the bug:\n\ndef mean(xs):\n    total = 0\n    for x in xs:\n        total =+ x\n"
    "    return total / len(xs)",
    "<ul>\n  <li>apples</li>\n  <li>pears</li>\n  <li>",
]

_COPY = [
    "Repeat after me: the quick brown fox jumps over the lazy dog.",
    "Correct the spelling: I recieved you're mesage yesterday and will definately anser it.",
    "Put these words in alphabetical order: pear, apple, quince, fig, mango, cherry.",
    "Rewrite in the past tense: She opens the window, looks at the garden and smiles.",
    "Turn into a numbered list: wake up, brush teeth, make coffee, read the news, go to work.",
    "Count from 1 to 30, separated by commas.",
    "Replace every 'cat' by 'dog': The cat saw another cat, and the two cats became friends.",
    "Quote the second sentence: It rained. The streets were empty. Nobody had an umbrella.",
]

_LANGUAGES = [
    "Wie heißt die Hauptstadt von Österreich, und welcher Fluss fließt durch sie?",
    "Écris une courte recette de crêpes pour quatre personnes.",
    "¿Cuáles son las ventajas de vivir cerca del mar?",
    "Perché il cielo è blu? Rispondi in due frasi.",
    "Escreva uma frase sobre a chuva em Lisboa.",
    "Jak se řekne česky 'good morning'?",
    "Почему зимой дни короче, чем летом?",
    "日本の首都はどこですか。簡単に説明してください。",
    "请用一句话解释什么是人工智能。",
    "한국의 전통 음식 세 가지를 소개해 주세요.",
    "ما هي عاصمة مصر؟",
    "Translate into German, French and Spanish: Where is the nearest pharmacy? 🙂",
]

PROMPTS = [*_QUESTIONS, *_WRITING, *_CODE, *_COPY, *_LANGUAGES]

COPY_PROMPTS = [
    """Rewrite the following text with every "Marta" replaced by "Elena", and change nothing else.

Marta left the harbour before sunrise, when the nets were still wet from the night. She had promised
her brother that the boat would be painted by Sunday, and Marta kept her promises. By noon the hull
was blue from bow to stern, the railing shone, and a row of white letters spelled the name of their
mother. The neighbours came to look. One of them, an old sailor with a straw hat, told Marta that he
had never seen a boat so proud of itself. Marta laughed, washed the brushes in the sea and went home
to sleep.""",
    """Repeat this code exactly, but rename the function `area` to `surface`.

```python
import math


def area(shape, *sizes):
    if shape == "circle":
        (radius,) = sizes
        return math.pi * radius**2
    if shape == "rectangle":
        width, height = sizes
        return width * height
    if shape == "triangle":
        base, height = sizes
        return base * height / 2
    raise ValueError(f"unknown shape: {shape}")


if __name__ == "__main__":
    print(area("circle", 2.0))
    print(area("rectangle", 3.0, 4.0))
    print(area("triangle", 3.0, 4.0))
    print(area("rectangle", 10.0, 0.5) + area("circle", 1.0))
```""",
    """Correct the spelling mistakes in this text and return the whole text.

The museum opens every day exept Monday from nine in the morning until six in the evening. Visitors
are asked to leave large bags and umbrelas in the cloakroom on the ground floor. Guided tours begin
at the main entrance at eleven and at three; they last about ninety minutes and are included in the
price of the ticket. Photographs may be taken without a flash. The cafe in the courtyard serves
soup, sandwiches and homemade cake. Children under twelve enter for free when they are acompanied by
an adult. Please keep your ticket until you leave the bilding.""",
    """Add type hints to this class and return the whole class.

```python
class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count=1):
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count=1):
        if self.items.get(name, 0) < count:
            raise KeyError(name)
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())

    def merge(self, other):
        for name, count in other.items.items():
            self.add(name, count)

    def report(self):
        lines = [f"{name}: {count}" for name, count in sorted(self.items.items())]
        return "\\n".join(lines)
```""",
    """Return this list with the price of the tea changed to 3.20. Keep everything else as it is.

- Espresso, single shot, served with a glass of water: 2.10
- Espresso, double shot, served with a glass of water: 2.90
- Cappuccino with whole milk or oat milk: 3.40
- Latte with whole milk or oat milk: 3.60
- Tea, black, green or peppermint, served in a pot: 2.80
- Hot chocolate with whipped cream: 3.90
- Fresh orange juice, small glass: 3.50
- Fresh orange juice, large glass: 4.80
- Sparkling water, bottle of half a litre: 2.60
- Apple cake with whipped cream: 4.20
- Cheesecake with raspberries: 4.60
- Toasted sandwich with cheese and tomato: 5.40
- Soup of the day with bread and butter: 6.20""",
    """Rewrite this JSON with "enabled" set to true for every entry, and keep the order of the keys.

```json
[
  {"name": "backup", "schedule": "0 2 * * *", "enabled": false, "retries": 3, "timeout": 600},
  {"name": "cleanup", "schedule": "30 2 * * *", "enabled": false, "retries": 1, "timeout": 120},
  {"name": "report", "schedule": "0 6 * * 1", "enabled": false, "retries": 2, "timeout": 300},
  {"name": "sync", "schedule": "*/15 * * * *", "enabled": false, "retries": 5, "timeout": 60},
  {"name": "reindex", "schedule": "0 3 * * 0", "enabled": false, "retries": 1, "timeout": 3600},
  {"name": "archive", "schedule": "0 4 1 * *", "enabled": false, "retries": 2, "timeout": 1800},
  {"name": "health", "schedule": "* * * * *", "enabled": false, "retries": 0, "timeout": 10}
]
```""",
    """Change this letter from "I" to "we" and leave all other words as they are.

Dear Ms. Okafor,

thank you for your order of twelve chairs and two tables. I am sorry to say that the chairs will
arrive a week later than I had promised, because the workshop that bends the wood was flooded in
spring and is still being repaired. I have already spoken to the carpenter, and I can deliver the
tables on the day that was agreed. If you would rather wait and receive everything together, please
tell me before Friday, and I will keep the tables in the warehouse free of charge. I apologise for
the delay and hope that you will enjoy the furniture for many years.

Kind regards
Jonas Lindqvist""",
    """Repeat the following function twice, the second time under the name `decode`.

```javascript
function encode(text, key) {
  const letters = "abcdefghijklmnopqrstuvwxyz";
  let result = "";
  for (let i = 0; i < text.length; i++) {
    const letter = text[i].toLowerCase();
    const place = letters.indexOf(letter);
    if (place < 0) {
      result += text[i];
      continue;
    }
    const shift = letters.indexOf(key[i % key.length]);
    const moved = letters[(place + shift + 26) % 26];
    result += text[i] === letter ? moved : moved.toUpperCase();
  }
  return result;
}

console.log(encode("Meet me at the old bridge", "lemon"));
console.log(encode("The answer is in the second drawer", "lemon"));
console.log(encode("Bring the red umbrella and wait", "lemon"));
```""",
    """Summarise the text in one sentence first, then copy the text word for word.

Bees tell each other where to find food by dancing. A bee that has found a rich field of flowers
returns to the hive and runs in the shape of an eight on the vertical comb. The middle part of the
eight is the message: its angle to the vertical is the angle between the sun and the flowers, and
the time it takes is the distance. The other bees follow in the dark and feel the dance with their
antennae. Then they fly out and find the field, even if the sun has moved in the meantime, because
they allow for its path across the sky.""",
    """Translate only the comments of this script into Spanish and return the whole script.

```bash
#!/usr/bin/env bash
set -euo pipefail

# Where the copies are kept
target="$HOME/backups/$(date +%Y-%m-%d)"
mkdir -p "$target"

# Copy each folder that the user named
for folder in "$@"; do
  if [ ! -d "$folder" ]; then
    echo "skipping $folder: not a folder" >&2
    continue
  fi
  name="$(basename "$folder")"
  tar -czf "$target/$name.tar.gz" -C "$(dirname "$folder")" "$name"
  echo "saved $folder to $target/$name.tar.gz"
done

# Remove copies older than thirty days
find "$HOME/backups" -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -r {} +

# Show how much room is left
df -h "$HOME/backups"
```""",
]
