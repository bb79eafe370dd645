import { defineConfig } from "vite";

// One script and one style sheet with fixed names: the offline page embeds them, `serve` sends them.
export default defineConfig({
  publicDir: false,
  build: {
    target: "es2022",
    outDir: "../src/meshscope/page/bundle",
    emptyOutDir: true,
    sourcemap: false,
    modulePreload: false,
    cssCodeSplit: false,
    reportCompressedSize: false,
    rolldownOptions: {
      input: "src/main.tsx",
      output: {
        format: "iife",
        entryFileNames: "page.js",
        assetFileNames: "page[extname]",
      },
    },
  },
});
