// Reads documents from files: lines of text, CSV, or JSON Lines.

const MAX_COLUMNS = 200;

/** The lines of a text that have text. */
export const linesOf = (text) => text.split(/\r?\n/).filter((line) => line.trim());

/** The columns of a file, and the texts of each; null for a file of lines. */
export function columnsOf(name, text) {
  if (name.endsWith(".jsonl")) {
    const rows = linesOf(text).map(valueOf);
    const columns = new Set(rows.flatMap((row) => (typeof row === "string" ? [] : Object.keys(row).filter((key) => typeof row[key] === "string"))));
    return { columns: [...columns].slice(0, MAX_COLUMNS), textsOf: (column) => rows.map((row) => (typeof row === "string" ? row : String(row[column] ?? ""))) };
  }
  if (!/\.[ct]sv$/.test(name)) return null;
  const [head, ...rows] = rowsOf(text, name.endsWith(".tsv") ? "\t" : ",");
  return { columns: (head ?? []).slice(0, MAX_COLUMNS), textsOf: (column) => rows.map((row) => row[head.indexOf(column)] ?? "") };
}

/** A line of JSON: a string or an object; any other line as it is. */
function valueOf(line) {
  try {
    const row = JSON.parse(line);
    return typeof row === "string" || (row && typeof row === "object") ? row : line;
  } catch {
    return line;
  }
}

/** Rows of CSV (RFC 4180): cells in quotes may have separators, line breaks and doubled quotes. Rows without text are left out. */
function rowsOf(text, separator) {
  const rows = [[]];
  let cell = "";
  let quoted = false;
  const characters = text.replace(/^\ufeff/, "").replaceAll("\r\n", "\n");
  for (let at = 0; at < characters.length; at += 1) {
    const character = characters[at];
    if (character === '"') {
      const doubled = quoted && characters[at + 1] === '"';
      if (doubled) {
        cell += character;
        at += 1;
      } else quoted = !quoted;
    } else if (quoted || (character !== separator && character !== "\n")) cell += character;
    else {
      rows.at(-1).push(cell);
      cell = "";
      if (character === "\n") rows.push([]);
    }
  }
  rows.at(-1).push(cell);
  return rows.filter((row) => row.some((each) => each.trim()));
}
